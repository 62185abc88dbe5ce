"""What the site's pages are made with; `mkdocs.yml` calls `hooks.py`."""
