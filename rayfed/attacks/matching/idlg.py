"""Improved deep leakage from gradients (iDLG): infer the labels first, then fit only the images.

Source: Zhao et al. 2020, "iDLG: Improved Deep Leakage from Gradients", algorithm 1.
"""

from __future__ import annotations

from rayfed.attacks.inference.labels import fits_labels
from rayfed.attacks.matching.dlg import Dlg
from rayfed.registry import component


@component
class Idlg(Dlg):
    """Infer the labels from the gradient, then fit the images as in DLG; batches use estimated label counts.

    If the gradient does not determine the labels, soft labels are fitted as well, starting from the likeliest labels.
    """

    reconstruct = fits_labels(Dlg.reconstruct)
