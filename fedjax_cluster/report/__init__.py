"""Tables, plots and run pages: what a person looks at after a run."""
