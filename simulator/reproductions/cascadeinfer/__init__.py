"""CascadeInfer's figures again: `findings` is the whole, the other modules its parts."""
