"""Attacks: components that reconstruct samples from updates or infer facts about them, one per file (see `base.py`).

`matching/` holds the shared code of gradient-matching attacks and `closed_form/` that of closed-form attacks.
`inference/` holds membership, property and GAN attacks, `text/` attacks on texts.
"""

TABLE: dict[str, str] = {
    "dlg": "rayfed.attacks.matching.dlg:Dlg",
    "idlg": "rayfed.attacks.matching.idlg:Idlg",
    "unlock": "rayfed.attacks.adaptive.unlock:Unlock",
    "inverting_gradients": "rayfed.attacks.matching.inverting_gradients:InvertingGradients",
    "two_images": "rayfed.attacks.adaptive.two_images:TwoImages",
    "gradinversion": "rayfed.attacks.matching.gradinversion:GradInversion",
    "gradvit": "rayfed.attacks.matching.gradvit:GradVit",
    "analytic": "rayfed.attacks.closed_form.analytic:Analytic",
    "spear": "rayfed.attacks.closed_form.spear:Spear",
    "peel": "rayfed.attacks.closed_form.peel:Peel",
    "april": "rayfed.attacks.closed_form.april:April",
    "columns": "rayfed.attacks.closed_form.columns:Columns",
    "entries": "rayfed.attacks.closed_form.entries:Entries",
    "buffers": "rayfed.attacks.closed_form.buffers:Buffers",
    "grnn": "rayfed.attacks.matching.grnn:Grnn",
    "ggl": "rayfed.attacks.matching.ggl:Ggl",
    "model_inversion": "rayfed.attacks.matching.model_inversion:ModelInversion",
    "imprint": "rayfed.attacks.server.imprint:Imprint",
    "peftleak": "rayfed.attacks.server.peftleak:PeftLeak",
    "embedding_rows": "rayfed.attacks.text.embedding_rows:EmbeddingRows",
    "tag": "rayfed.attacks.text.tag:Tag",
    "dager": "rayfed.attacks.text.dager:Dager",
    "gan": "rayfed.attacks.inference.gan:Gan",
    "membership": "rayfed.attacks.inference.membership:Membership",
    "property_inference": "rayfed.attacks.inference.property_inference:PropertyInference",
}
