"""Poisonings: behaviours of malicious clients, one per file. `TABLE` lists the names for scenarios."""

TABLE: dict[str, str] = {
    "a_little_is_enough": "rayfed.poisoning.a_little_is_enough:ALittleIsEnough",
    "backdoor": "rayfed.poisoning.backdoor:Backdoor",
    "gaussian_update": "rayfed.poisoning.gaussian_update:GaussianUpdate",
    "label_flip": "rayfed.poisoning.label_flip:LabelFlip",
    "scaled_update": "rayfed.poisoning.scaled_update:ScaledUpdate",
    "sign_flip": "rayfed.poisoning.sign_flip:SignFlip",
}
