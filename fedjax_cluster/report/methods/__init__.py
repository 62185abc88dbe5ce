"""Pictures of single methods, one file a method; `figures(run)` of each draws all that a finished run allows."""
