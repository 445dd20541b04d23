"""Plans: the choice of every layer, as text, as a table, and between two of them."""
