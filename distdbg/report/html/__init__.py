"""The report: one HTML file that needs no network and no script.

svg.py     text that is safe in HTML, shapes as SVG
style.py   colours and layout, light and dark
lanes.py, tree.py, graph.py, heat.py, steps.py, tables.py   one module a picture
page.py    puts them together
"""

from distdbg.report.html.page import render

__all__ = ["render"]
