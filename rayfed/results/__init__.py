"""What a run leaves behind: its folder, tables, checkpoint, images and report."""
