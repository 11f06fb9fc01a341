"""The cycle model of a kernel's main loop. Every figure is modelled; `published` compares it with published ones."""

from .mainloop import Report, model
from .params import Parameters

__all__ = ["Parameters", "Report", "model"]
