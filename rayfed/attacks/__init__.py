"""Attacks: one a file, each a component that turns what was observed into images and labels (see `base.py`).

`matching.py`, `priors.py`, `labels.py` and `lbfgs.py` hold what several of them share.
"""

TABLE: dict[str, str] = {
    "dlg": "rayfed.attacks.dlg:Dlg",
    "idlg": "rayfed.attacks.idlg:Idlg",
    "inverting_gradients": "rayfed.attacks.inverting_gradients:InvertingGradients",
    "analytic": "rayfed.attacks.analytic:Analytic",
    "imprint": "rayfed.attacks.imprint:Imprint",
    "gan": "rayfed.attacks.gan:Gan",
    "membership": "rayfed.attacks.membership:Membership",
    "property_inference": "rayfed.attacks.property_inference:PropertyInference",
}
