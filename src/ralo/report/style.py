"""How a report looks: one column on a phone, two beside each other where there is room."""

from ralo.report.tables import shades


def _shades(dark: bool) -> str:
    return " ".join(f"--{name}: {colour};" for name, colour in shades(dark).items())


_FILLS = "\n".join(f".{name} {{ background: var(--{name}) }}" for name in shades(False))
STYLE = f"""
:root {{ {_shades(False)} }}
@media (prefers-color-scheme: dark) {{ :root {{ {_shades(True)} }} }}
{_FILLS}
* {{ box-sizing: border-box }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: auto; padding: 1.5rem 0.75rem 4rem;
  overflow-wrap: anywhere; -webkit-text-size-adjust: 100% }}
h1 {{ font-size: 1.6rem; line-height: 1.2; margin: 0 0 1rem }}
h2 {{ font-size: 1.2rem; line-height: 1.3; margin: 0 0 0.75rem }}
section {{ margin-top: 2.5rem; padding-top: 1.5rem; border-top: 1px solid var(--faint) }}
.brand {{ margin: 0; color: var(--soft); font-size: 0.875rem; letter-spacing: 0.04em }}
.note {{ margin: 0.75rem 0; color: var(--soft); font-size: 0.875rem; max-width: 46rem }}
dl, dd {{ margin: 0 }}
.about div {{ display: grid; grid-template-columns: 5.5rem 1fr; gap: 1rem; font-size: 0.875rem }}
.about dt {{ color: var(--soft) }}
.cards {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 10rem), 1fr)); gap: 0.75rem }}
.cards div {{ background: var(--card); border: 1px solid var(--faint); border-radius: 8px; padding: 0.75rem 1rem;
  max-width: 22rem }}
.cards dt, .cards dd {{ color: var(--soft); font-size: 0.875rem; line-height: 1.35 }}
.cards .big {{ color: var(--ink); font-size: 1.9rem; font-weight: 650; line-height: 1.3 }}
.figures {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)); gap: 1.5rem }}
@media (min-width: 56rem) {{ .beside {{ grid-template-columns: 23rem minmax(0, 1fr) }} }}
figure {{ margin: 0; max-width: 30rem }}
figcaption {{ font-weight: 600; font-size: 0.9375rem; margin-bottom: 0.25rem }}
svg {{ max-width: none }}
svg text {{ paint-order: stroke; stroke: var(--paper); stroke-width: 3px; stroke-linejoin: round }}
polygon.full {{ stroke: var(--paper) }}
.wide {{ overflow-x: auto; margin-top: 1rem }}
table {{ border-collapse: collapse; font-size: 0.875rem; line-height: 1.35; font-variant-numeric: tabular-nums;
  overflow-wrap: normal }}
th, td {{ padding: 0.35rem 0.45rem; text-align: left; vertical-align: top; border-bottom: 1px solid var(--faint) }}
th:first-child {{ padding-left: 0; position: sticky; left: 0; background: var(--paper) }}
thead th {{ color: var(--soft); font-weight: 600; white-space: nowrap }}
tbody th {{ font-weight: 600; overflow-wrap: anywhere; max-width: 22rem }}
td {{ white-space: nowrap }}
th[scope=rowgroup] {{ padding-top: 1.1rem; color: var(--soft); max-width: none }}
td.good, td.bad {{ color: var(--colour); font-weight: 700 }}
.heat {{ width: 100%; table-layout: fixed; min-width: calc(2.5rem + 4.6rem * var(--places, 4)) }}
.heat th:first-child {{ width: 3rem; min-width: 0 }}
.heat td {{ border: 2px solid var(--paper); border-radius: 4px; padding: 0.3rem 0.4rem; overflow-wrap: anywhere;
  white-space: normal }}
.heat b, .heat span {{ display: block }}
.heat span {{ font-size: 0.75rem; line-height: 1.25 }}
.scale {{ display: flex; flex-wrap: wrap; gap: 2px; margin: 0; padding: 0; list-style: none; font-size: 0.8125rem }}
.scale li {{ padding: 0.1rem 0.5rem; border: 1px solid var(--faint) }}
.lines {{ width: 100% }}
.lines tbody th[scope=row] {{ font-weight: 400; position: static; max-width: none }}
.lines td:last-child {{ white-space: normal; min-width: 6.5rem }}
"""
