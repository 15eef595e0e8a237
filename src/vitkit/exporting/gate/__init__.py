"""The gate: an exported model is run alone, compared with torch, and refused if it is worse."""
