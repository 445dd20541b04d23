"""The world, its groups, and a record of what they communicate."""
