"""What hypothesis draws for plans."""

from hypothesis import strategies as st


@st.composite
def shares(draw, count):
    """Relative sizes for `count` ranks: zeros welcome, but not everywhere."""
    drawn = [draw(st.integers(0, 3)) for _ in range(count)]
    return tuple(drawn) if any(drawn) else (1, *drawn[1:])
