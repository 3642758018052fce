"""Named bytes with a dtype and a shape, as safetensors files hold them.

Defined where the model layer, which makes them and may not import this one, can import them too.
"""

from mlxcache.tensor import ITEM_BYTES, Tensor

__all__ = ["ITEM_BYTES", "Tensor"]
