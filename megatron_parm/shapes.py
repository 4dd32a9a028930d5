"""The letters of shape comments, and the one check that public entries make of them. Floor 0.

    s  sequence length            E  experts of the whole layer
    b  micro-batch size           e  experts held by this rank, E / ep
    n  tokens, s * b              k  experts a token is sent to (top-k)
    h  hidden size                c  capacity, slots an expert keeps
    f  feed-forward width         V  vocabulary rows, padded

Dense activations are `[s, b, h]`, routed tokens `[n, h]`, buckets `[E, c, h]`: sizes on one rank, written `/tp` where a
process axis has cut them.
"""

from torch import Tensor


def expect_shape(tensor: Tensor, letters: str, **sizes: int) -> None:
    """Check that `tensor` has one dim per letter of `letters` (separated by spaces) and the sizes given by name.

    `expect_shape(x, "n h", h=256)` accepts any n. Raises ValueError naming the letters, the sizes and the shape found.
    """
    names = letters.split()
    found = tuple(tensor.shape)
    wrong = len(names) != len(found) or any(
        name in sizes and sizes[name] != size for name, size in zip(names, found, strict=True)
    )
    if wrong:
        wanted = ", ".join(f"{name}={sizes[name]}" if name in sizes else name for name in names)
        raise ValueError(f"expected a tensor of shape [{wanted}], found {list(found)}")
