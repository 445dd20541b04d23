"""What notebooks show, made as text: HTML, pictures in SVG, and charts."""
