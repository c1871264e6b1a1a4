"""The frame of the report: one HTML page with its style inside, light and dark, nothing loaded from elsewhere."""

from __future__ import annotations

from html import escape

_LIGHT = ("#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#0891b2", "#be185d", "#6b7280")
_DARK = ("#7aa7ff", "#f5b04c", "#4fd1a1", "#ff8080", "#b79cff", "#5ccfe6", "#f28ac0", "#9aa3b2")

_STYLE = """
:root{color-scheme:light dark;--bg:#f7f8fa;--panel:#fff;--ink:#1b1f27;--soft:#5b6473;--rule:#e3e6ec;--bad:#b42318;LIGHT}
@media(prefers-color-scheme:dark){:root{--bg:#12151b;--panel:#1a1f28;--ink:#e7eaf0;--soft:#9aa3b2;--rule:#2c333f;
--bad:#ff8a7a;DARK}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink)}
body{font:15px/1.5 system-ui,-apple-system,"Segoe UI","DejaVu Sans",sans-serif}
main{max-width:1120px;margin:0 auto;padding:24px 20px 60px}
h1{font-size:22px;margin:0 0 12px}h2{font-size:17px;margin:28px 0 10px}h3{font-size:14px;margin:6px 0;color:var(--soft)}
.words,.missing,figure,.card,details,.scroll,pre{background:var(--panel);border:1px solid var(--rule);border-radius:8px}
.words{padding:14px 16px;margin:0 0 16px}.failed{border-color:var(--bad);border-left:5px solid var(--bad)}
.missing{padding:2px 16px 4px;margin-top:16px}
.missing h2{margin:10px 0 0}.missing ul{margin:6px 0 10px;padding-left:20px}
.cards{display:grid;grid-template-columns:repeat(auto-fill,minmax(150px,1fr));gap:10px}
.card{padding:10px 14px}.card b{display:block;font-size:22px;font-weight:600;font-variant-numeric:tabular-nums}
.card span,figcaption,p{color:var(--soft)}.words{color:var(--ink)}
.grid2{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(460px,100%),1fr));gap:14px}.grid2>*{min-width:0}
figure{margin:0;padding:12px 14px}figcaption{font-weight:600;margin-bottom:6px}small{font-weight:400;opacity:.8}
svg{display:block;width:100%;height:auto}
.grid{stroke:var(--rule)}.mark{stroke:var(--soft);stroke-dasharray:3 3}
.tick,.lane{fill:var(--soft);font-size:12px}.lane{fill:var(--ink)}
.ln{fill:none;stroke:var(--c);stroke-width:2.2;stroke-linejoin:round}.faint{stroke-width:1.2;opacity:.45}
.dot,.bar{fill:var(--c)}.bar{opacity:.88}
.legend{display:flex;flex-wrap:wrap;gap:4px 16px;font-size:13px;color:var(--soft);padding-top:4px}
.key{display:inline-block;width:11px;height:11px;border-radius:3px;background:var(--c);margin-right:6px}
.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%;font-size:13px}
th,td{text-align:left;padding:5px 10px;border-bottom:1px solid var(--rule);vertical-align:top}th{color:var(--soft)}
tr:last-child td{border-bottom:0}.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
code,pre{font-family:ui-monospace,"DejaVu Sans Mono",Menlo,monospace;font-size:12.5px}
pre{padding:12px 14px;margin:0;overflow-x:auto;white-space:pre-wrap;overflow-wrap:anywhere}
details{padding:10px 14px;margin-top:28px}details pre{border:0;padding:10px 0 0}summary{cursor:pointer;font-weight:600}
"""


def page(title: str, body: str) -> str:
    """`title` is plain text, `body` HTML."""
    style = _STYLE.replace("LIGHT", _variables(_LIGHT)).replace("DARK", _variables(_DARK))
    style += "".join(f".c{i}{{--c:var(--c{i})}}" for i in range(len(_LIGHT)))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style}</style></head>"
        f"<body><main><h1>{escape(title)}</h1>{body}</main></body></html>\n"
    )


def _variables(colors: tuple[str, ...]) -> str:
    return "".join(f"--c{i}:{color};" for i, color in enumerate(colors))
