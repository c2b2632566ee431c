"""From results to the page: tables, plots, and sentences that follow from the numbers."""
