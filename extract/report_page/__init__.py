"""One HTML page for a person who wants to look at an extraction job: facts gathered from its output, charts drawn."""
