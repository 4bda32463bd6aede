"""From hidden states to log-probs and entropies, without a `[T, V]` tensor."""
