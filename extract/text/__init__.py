"""Rows of text, conversations or ids -> token ids under the limit, the same ids as the original tokenizer gives."""
