"""Terminal: the lines and tables that commands print."""
