"""Where a checkpoint comes from: a folder, or the Hub at one commit."""
