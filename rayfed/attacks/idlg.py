"""Improved deep leakage from gradients: the labels are inferred first, then the images alone are fitted.

Source: Zhao et al. 2020, "iDLG: Improved Deep Leakage from Gradients", algorithm 1.
"""

from __future__ import annotations

from rayfed.attacks.dlg import Dlg
from rayfed.attacks.labels import fits_labels
from rayfed.registry import component


@component
class Idlg(Dlg):
    """DLG that infers the labels from the gradient first, for batches from estimated label counts.

    Where the gradient does not tell them, soft labels are fitted as by DLG, too, from the likeliest on.
    """

    reconstruct = fits_labels(Dlg.reconstruct)
