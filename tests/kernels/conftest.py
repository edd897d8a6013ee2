"""Select Triton's interpreter if there is no GPU. This must happen before Triton is imported."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
