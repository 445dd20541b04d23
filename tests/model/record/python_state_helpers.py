"""A module that counts, as one beside a notebook may."""

calls = 0
