"""What every widget is made of: its browser half, its messages, its work in the background."""
