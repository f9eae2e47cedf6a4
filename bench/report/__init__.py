"""A result file as groups of rows, as Markdown tables and as charts."""
