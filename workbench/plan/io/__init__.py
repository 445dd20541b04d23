"""What all values share: errors, files, HTML, units."""
