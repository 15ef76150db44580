"""Training heads: rollouts, objectives, the loop; and drafts by distillation."""
