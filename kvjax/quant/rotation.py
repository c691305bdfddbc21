"""The orthogonal transform that spreads a vector's energy evenly over its dims."""

import functools

import numpy as np


@functools.cache
def rotation(size: int) -> np.ndarray:
    """A symmetric orthogonal matrix [size, size], its own inverse; float32.

    The normalised Walsh-Hadamard matrix for powers of two, times (Kronecker) the reflection
    I - 2/m 11^T for an odd factor m, which mixes well for the small m of real heads (96 = 32 * 3).
    """
    power = size & -size
    odd = size // power
    matrix = np.eye(odd) - 2.0 / odd * np.ones((odd, odd)) if odd > 1 else np.ones((1, 1))
    for _ in range(power.bit_length() - 1):
        matrix = np.kron(matrix, np.array([[1.0, 1.0], [1.0, -1.0]]) / np.sqrt(2.0))
    return matrix.astype(np.float32)
