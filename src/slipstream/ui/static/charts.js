// Charts as SVG: lines, sparklines, diverging bars. Every series has a dash pattern of its own and
// its name at its end, so that colour is not needed to read them. Touch this when a chart should
// show something else.

import { html } from "./parts.js";
import { useEffect, useRef, useState } from "./vendor/hooks.js";

const DASHES = ["", "6 3", "2 3", "8 3 2 3", "1 4", "12 4"];
export const seriesClass = (place) => `series s${place % 6}`;

export function useWidth(least = 240) {
  const box = useRef(null);
  const [width, setWidth] = useState(640);
  useEffect(() => {
    const watch = new ResizeObserver(([entry]) => setWidth(Math.max(least, entry.contentRect.width)));
    watch.observe(box.current);
    return () => watch.disconnect();
  }, []);
  return [box, width];
}

export function ticks(low, high, most = 5) {
  if (!(high > low)) return [low];
  const rough = (high - low) / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((factor) => factor * power >= rough) * power;
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step / 1e6; value += step) found.push(value);
  return found;
}

export function shortNumber(value) {
  const size = Math.abs(value);
  if (size >= 1e9) return `${+(value / 1e9).toPrecision(3)}G`;
  if (size >= 1e6) return `${+(value / 1e6).toPrecision(3)}M`;
  if (size >= 1e4) return `${+(value / 1e3).toPrecision(3)}k`;
  return String(+value.toPrecision(4));
}

// Lines over a common x. `series`: [{name, points: [[x, y], …]}].
export function LineChart({ title, unit, xLabel, series, height = 240 }) {
  const [box, width] = useWidth();
  const [at, setAt] = useState(null);
  const drawn = series.map((each) => ({ ...each, points: each.points.filter(([, y]) => Number.isFinite(y)) }));
  const points = drawn.flatMap((each) => each.points);
  const name = `${title}, ${unit}, by ${xLabel}`;
  if (!points.length) {
    return html`<figure class="chart" ref=${box}><figcaption>${title}</figcaption>
      <p class="muted">No ${title} was recorded for what is chosen.</p></figure>`;
  }
  const margin = { left: 56, right: 12, top: 8, bottom: 32 };
  const xs = points.map(([x]) => x), ys = points.map(([, y]) => y);
  const x0 = Math.min(...xs), x1 = Math.max(...xs, x0 + 1e-9);
  const yLow = Math.min(...ys), yHigh = Math.max(...ys);
  const pad = (yHigh - yLow || Math.abs(yHigh) || 1) * 0.06;
  const y0 = yLow >= 0 && yLow < (yHigh - yLow) ? 0 : yLow - pad, y1 = yHigh + pad;
  const inner = { w: width - margin.left - margin.right, h: height - margin.top - margin.bottom };
  const X = (x) => margin.left + ((x - x0) / (x1 - x0)) * inner.w;
  const Y = (y) => margin.top + (1 - (y - y0) / (y1 - y0)) * inner.h;
  const path = (list) => list.map(([x, y], i) => `${i ? "L" : "M"}${X(x).toFixed(1)} ${Y(y).toFixed(1)}`).join("");
  const move = (event) => {
    const place = event.currentTarget.getBoundingClientRect();
    const x = x0 + ((event.clientX - place.left) * (width / place.width) - margin.left) / inner.w * (x1 - x0);
    setAt(Math.max(x0, Math.min(x1, x)));
  };
  const near = at === null ? [] : drawn.map((each) => nearest(each.points, at)).map((p, i) => p && { ...p, i });
  return html`<figure class="chart" ref=${box}>
    <figcaption>${title} <span class="muted">${unit}</span></figcaption>
    <svg viewBox="0 0 ${width} ${height}" width=${width} height=${height} role="img" aria-label=${name}
      onPointerMove=${move} onPointerLeave=${() => setAt(null)}>
      ${ticks(y0, y1).map((y) => html`<g class="tick" key=${y}>
        <line x1=${margin.left} x2=${width - margin.right} y1=${Y(y)} y2=${Y(y)} />
        <text x=${margin.left - 6} y=${Y(y) + 4} text-anchor="end">${shortNumber(y)}</text></g>`)}
      ${ticks(x0, x1, Math.max(2, Math.floor(width / 110))).map((x) => html`<text class="label" key=${x}
        x=${X(x)} y=${height - 14} text-anchor="middle">${shortNumber(x)}</text>`)}
      <text class="label" x=${width - margin.right} y=${height - 1} text-anchor="end">${xLabel}</text>
      ${drawn.map((each, i) => html`<path key=${each.name} class=${seriesClass(i)} d=${path(each.points)}
        stroke-dasharray=${DASHES[i % 6]} />`)}
      ${drawn.map((each, i) => each.points.length === 1 && html`<circle class=${seriesClass(i)} r="3"
        cx=${X(each.points[0][0])} cy=${Y(each.points[0][1])} />`)}
      ${at !== null && html`<line class="cursor" x1=${X(at)} x2=${X(at)} y1=${margin.top} y2=${margin.top + inner.h} />`}
      ${near.map((p) => p && html`<circle class=${seriesClass(p.i)} r="3.5" cx=${X(p.x)} cy=${Y(p.y)} />`)}
    </svg>
    <ul class="legend">${drawn.map((each, i) => html`<li key=${each.name}>
      <svg width="28" height="8" aria-hidden="true"><path class=${seriesClass(i)} d="M0 4H28" stroke-dasharray=${DASHES[i % 6]} /></svg>
      ${each.name} <b>${near[i] ? `${shortNumber(near[i].y)} at ${shortNumber(near[i].x)}` : lastOf(each.points)}</b></li>`)}</ul>
  </figure>`;
}

const lastOf = (points) => (points.length ? shortNumber(points[points.length - 1][1]) : "–");

function nearest(points, x) {
  let best = null;
  for (const [px, py] of points) {
    if (best === null || Math.abs(px - x) < Math.abs(best.x - x)) best = { x: px, y: py };
  }
  return best;
}

export function Sparkline({ values, label, width = 96, height = 24 }) {
  const known = values.filter((value) => Number.isFinite(value));
  const top = Math.max(...known, 1e-9);
  const X = (i) => (values.length < 2 ? width : (i / (values.length - 1)) * width);
  let path = "", pen = "M";
  values.forEach((value, i) => {
    if (!Number.isFinite(value)) {
      pen = "M";
      return;
    }
    path += `${pen}${X(i).toFixed(1)} ${(height - 2 - (value / top) * (height - 4)).toFixed(1)}`;
    pen = "L";
  });
  return html`<svg class="spark" width=${width} height=${height} role="img" aria-label=${label}><path d=${path} /></svg>`;
}

// Effects below and above zero, largest first. `rows`: [{key, name, note, value, shown}].
export function Effects({ rows, label }) {
  const top = Math.max(...rows.map((row) => Math.abs(row.value)), 1e-12);
  return html`<ol class="effects" aria-label=${label}>
    ${rows.map((row) => html`<li key=${row.key}>
      <span class="name">${row.name} ${row.note && html`<small>${row.note}</small>`}</span>
      <svg aria-hidden="true" preserveAspectRatio="none">
        <line x1="50%" x2="50%" y1="0" y2="100%" />
        <rect class=${row.value < 0 ? "down" : "up"} height="100%"
          x="${row.value < 0 ? 50 - (50 * -row.value) / top : 50}%" width="${(50 * Math.abs(row.value)) / top}%" />
      </svg>
      <span class="number">${row.shown}</span></li>`)}
  </ol>`;
}
