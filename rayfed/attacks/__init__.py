"""Attacks: one a file, each a component that turns what was observed into images and labels (see `base.py`).

`matching.py`, `options.py`, `local_steps.py`, `priors.py`, `batch_norm.py`, `labels.py`, `lbfgs.py` and `adam.py` hold
what several of them share.
"""

TABLE: dict[str, str] = {
    "dlg": "rayfed.attacks.dlg:Dlg",
    "idlg": "rayfed.attacks.idlg:Idlg",
    "inverting_gradients": "rayfed.attacks.inverting_gradients:InvertingGradients",
    "gradinversion": "rayfed.attacks.gradinversion:GradInversion",
    "analytic": "rayfed.attacks.analytic:Analytic",
    "grnn": "rayfed.attacks.grnn:Grnn",
    "ggl": "rayfed.attacks.ggl:Ggl",
    "model_inversion": "rayfed.attacks.model_inversion:ModelInversion",
    "imprint": "rayfed.attacks.imprint:Imprint",
    "gan": "rayfed.attacks.gan:Gan",
    "membership": "rayfed.attacks.membership:Membership",
    "property_inference": "rayfed.attacks.property_inference:PropertyInference",
}
