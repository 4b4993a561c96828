"""From what requests ask to changes of logits: penalties, biases, masks. Knows token prefixes; does not know models, slots' owners or the log."""
