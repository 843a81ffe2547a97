"""The Ray layer: who runs where. No algorithm lives here."""
