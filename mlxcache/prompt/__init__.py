"""Rendering and tokenising conversations: `builder.PromptBuilder`. No MLX."""
