"""Emulated hosts: namespaces with shaped links and shares of the processors."""
