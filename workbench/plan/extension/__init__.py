"""What a person brings: objects of their own, and ideas that extend the workbench."""
