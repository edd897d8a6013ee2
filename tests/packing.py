"""Which weights oneDNN packs on the CPU that runs the tests."""

from __future__ import annotations

import pytest
import torch

from quire.quant.packed import can_pack


def need_packed(dtype: torch.dtype) -> None:
    """Skip the test if oneDNN packs no weights of `dtype` here, and Quire therefore reads none that are packed."""
    if not can_pack(dtype):
        pytest.skip(f"oneDNN packs no weights in {dtype} on this CPU")
