"""Training: conversations -> tokens and loss mask -> the frozen base's hidden states -> heads -> checkpoint."""
