"""Attacks: components that reconstruct samples from updates or infer facts about them, one per file (see `base.py`).

`matching/` holds the shared code of gradient-matching attacks and `closed_form/` that of closed-form attacks.
`inference/` holds membership, property and GAN attacks, `text/` attacks on texts.
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
