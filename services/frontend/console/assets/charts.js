// Time series, drawn by uPlot. Each has its latest values in words beside it, for those who do not see it.

import { clock, h, isSimulatedTime } from "./dom.js";

const HEIGHT_PX = 150;
const COLORS = ["--series-1", "--series-2", "--series-3", "--series-4"];

function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** series: {label, value(point)}; `format` makes words of a value. */
export class Chart {
  constructor(title, series, format) {
    this.series = series;
    this.format = format;
    this.words = h("p", { class: "latest" });
    this.plotBox = h("div", { class: "plot", role: "img", "aria-label": title });
    this.element = h("figure", { class: "chart" }, h("figcaption", {}, title), this.words, this.plotBox);
    this.data = [[], ...series.map(() => [])];
    this.theme = "";
    new ResizeObserver(() => this.#fit()).observe(this.plotBox);
  }

  update(points) {
    this.data = [points.map((point) => point.at_unix_ms / 1000), ...this.series.map((each) => points.map(each.value))];
    const last = points.at(-1);
    this.words.replaceChildren(...this.series.flatMap((each, index) => [
      h("span", { class: `dot series-${index + 1}`, "aria-hidden": "true" }),
      `${each.label} ${last ? this.format(each.value(last)) : "–"}  `,
    ]));
    const theme = css("--text");
    if (!this.plot || this.theme !== theme) this.#make(theme);
    else this.plot.setData(this.data);
  }

  #make(theme) {
    if (!this.plotBox.clientWidth) return;
    this.plot?.destroy();
    this.theme = theme;
    const axis = { stroke: css("--quiet"), grid: { stroke: css("--line"), width: 1 }, ticks: { stroke: css("--line"), width: 1 }, font: "11px system-ui" };
    this.plot = new uPlot({
      width: this.plotBox.clientWidth,
      height: HEIGHT_PX,
      legend: { show: false },
      cursor: { y: false, drag: { x: false, y: false } },
      scales: { y: { range: (_, low, high) => [0, high > 0 ? high * 1.1 : 1] } },
      axes: [{ ...axis, space: 70, ...(isSimulatedTime() ? { values: (_, ticks) => ticks.map((tick) => clock(1000 * tick)) } : {}) }, { ...axis, size: 56, values: (_, ticks) => ticks.map((tick) => this.format(tick)) }],
      series: [{}, ...this.series.map((each, index) => ({
        label: each.label, stroke: css(COLORS[index]), width: 2, dash: index % 2 ? [6, 3] : undefined, points: { show: false }, spanGaps: true,
      }))],
    }, this.data, this.plotBox);
  }

  #fit() {
    if (!this.plot) this.#make(css("--text"));
    else if (this.plotBox.clientWidth) this.plot.setSize({ width: this.plotBox.clientWidth, height: HEIGHT_PX });
  }
}
