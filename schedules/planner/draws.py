"""Random numbers that Python and C draw alike."""

__all__ = ["Draws"]

_MASK = 2**64 - 1


class Draws:
    """Whole numbers at random: xorshift64 (Marsaglia, "Xorshift RNGs", 2003).

    >>> draws = Draws(0)
    >>> [draws.below(6) for _ in range(8)]
    [5, 2, 2, 1, 1, 3, 3, 5]
    """

    def __init__(self, seed: int) -> None:
        self.state = 0x9E3779B97F4A7C15 * (2 * seed + 1) & _MASK

    def below(self, n: int) -> int:
        """Draw one of 0 to n - 1, for n up to 2**32."""
        x = self.state
        x ^= x << 13 & _MASK
        x ^= x >> 7
        x ^= x << 17 & _MASK
        self.state = x
        return (x >> 32) * n >> 32
