"""A class of a model whose weights are elsewhere. Imported where torch is."""

from __future__ import annotations

try:
    import torch

    Base: type = torch.nn.Module
except ImportError:
    Base = object


class Linear(Base):
    def __init__(self, columns: int, rows: int) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(columns, rows)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.layer(x) * scale
