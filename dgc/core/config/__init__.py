"""Options: what a user chose, validated, and what follows from it at a step."""
