"""Export: tables and figures for papers, and copies that are safe to share."""
