"""Attacks: one a file, each a component that turns what was observed into images and labels (see `base.py`).

`matching/` holds what gradient-matching attacks share, `closed_form/` what closed forms do, `inference/` the attacks
that rebuild nothing, `text/` those on texts; `labels.py`, `forward_probe.py` and `groups.py` serve all of them.
"""

TABLE: dict[str, str] = {
    "dlg": "rayfed.attacks.dlg:Dlg",
    "idlg": "rayfed.attacks.idlg:Idlg",
    "unlock": "rayfed.attacks.unlock:Unlock",
    "inverting_gradients": "rayfed.attacks.inverting_gradients:InvertingGradients",
    "two_images": "rayfed.attacks.two_images:TwoImages",
    "gradinversion": "rayfed.attacks.gradinversion:GradInversion",
    "gradvit": "rayfed.attacks.gradvit:GradVit",
    "analytic": "rayfed.attacks.analytic:Analytic",
    "spear": "rayfed.attacks.spear:Spear",
    "peel": "rayfed.attacks.peel:Peel",
    "april": "rayfed.attacks.april:April",
    "columns": "rayfed.attacks.columns:Columns",
    "entries": "rayfed.attacks.entries:Entries",
    "buffers": "rayfed.attacks.buffers:Buffers",
    "grnn": "rayfed.attacks.grnn:Grnn",
    "ggl": "rayfed.attacks.ggl:Ggl",
    "model_inversion": "rayfed.attacks.model_inversion:ModelInversion",
    "imprint": "rayfed.attacks.imprint:Imprint",
    "peftleak": "rayfed.attacks.peftleak:PeftLeak",
    "embedding_rows": "rayfed.attacks.text.embedding_rows:EmbeddingRows",
    "tag": "rayfed.attacks.text.tag:Tag",
    "dager": "rayfed.attacks.text.dager:Dager",
    "gan": "rayfed.attacks.inference.gan:Gan",
    "membership": "rayfed.attacks.inference.membership:Membership",
    "property_inference": "rayfed.attacks.inference.property_inference:PropertyInference",
}
