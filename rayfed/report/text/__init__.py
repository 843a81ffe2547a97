"""Text for readers: one function for each reason or fact. The terminal, the page, the statement and exports use it."""
