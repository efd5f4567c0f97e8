"use strict";
// Draws the page's charts with uPlot from the JSON in #data, and ties the controls to them.
// Text from records is only ever set as textContent.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const darkSystem = matchMedia("(prefers-color-scheme: dark)");
  const views = [];
  const PRINT_SIZE = { width: 680, height: 230 };
  let printing = false;

  const isDark = () => !printing && (root.classList.contains("dark") || (darkSystem.matches && !root.classList.contains("light")));
  const color = name => getComputedStyle(root).getPropertyValue(name).trim();
  const PER_LINE = 3; // series of each line: its mean, the upper and the lower end of its band

  // Short, with plain digits where they are few.
  function shown(value) {
    const size = Math.abs(value);
    if (size >= 1e6) return `${Number((value / 1e6).toPrecision(4))}M`;
    if (size >= 1e4) return value.toFixed(0);
    return size === 0 || size >= 1e-4 ? String(Number(value.toPrecision(4))) : value.toExponential(2);
  }

  // For an axis, which has little room.
  function tick(value) {
    const size = Math.abs(value);
    return size >= 1e5 && size < 1e6 ? `${Number((value / 1e3).toPrecision(4))}k` : shown(value);
  }

  // A mean to the second digit of its error: 93.83 ± 0.34.
  function shownWithError(mean, error) {
    if (!error) return shown(mean);
    const decimals = Math.max(0, Math.min(8, 1 - Math.floor(Math.log10(error))));
    if (Math.abs(mean) >= 1e6 || error < 1e-7) return `${shown(mean)} ± ${shown(error)}`;
    return `${mean.toFixed(decimals)} ± ${error.toFixed(decimals)}`;
  }

  // The points of one line over an axis: x, mean, and the ends of the band. Empty where the axis was not recorded.
  function points(line, method, axis, { bounds, steps }, floor) {
    const places = method.x[axis];
    if (!places) return [[], [], [], []];
    const fit = value => (value === null || (floor && value <= 0) ? null : value);
    const end = (index, sign) => {
      if (line.mean[index] === null || line.error[index] === null) return null;
      const value = line.mean[index] + sign * line.error[index];
      return Math.max(floor || -Infinity, bounds[0] ?? -Infinity, Math.min(bounds[1] ?? Infinity, value));
    };
    const indices = line.mean.map((_, index) => index);
    const columns = [
      line.at.map(place => places[place]), line.mean.map(fit),
      indices.map(index => end(index, 1)), indices.map(index => end(index, -1)),
    ];
    // A step holds for the epoch before its point: the first one begins at 0.
    return steps && line.at[0] === 0 ? columns.map((column, number) => [number ? column[0] : 0, ...column]) : columns;
  }

  // On a log scale nothing may lie at or below zero: bands end a little under the lowest mean.
  function logFloor(chart) {
    const positive = chart.lines.flatMap(line => line.mean).filter(value => value > 0);
    return positive.length ? Math.min(...positive) / 1.5 : null;
  }

  const WHOLE_NUMBERS = [];
  for (let power = 1; power < 1e15; power *= 10) WHOLE_NUMBERS.push(power, 2 * power, 5 * power);

  // A little room at both ends, where uPlot alone would go on to the next whole power.
  function logRange(_, low, high) {
    if (low === null || high === null) return [1, 10];
    const margin = Math.max(1.05, (high / low) ** 0.04);
    return [low / margin, high * margin];
  }

  // Whole powers of the base, of ten also 2 and 5 where there are few; plain steps where even these are too few.
  function logTicks(base) {
    const powers = (low, high, factors) => {
      const ticks = [];
      for (let power = base ** Math.floor(Math.log(low) / Math.log(base)); power <= high; power *= base) {
        ticks.push(...factors.map(factor => Number((factor * power).toPrecision(12))).filter(tick => tick >= low && tick <= high));
      }
      return ticks;
    };
    const splits = (_plot, _axis, low, high) => {
      let ticks = powers(low, high, [1]);
      if (base === 10 && ticks.length < 3) ticks = powers(low, high, [1, 2, 5]);
      if (ticks.length < 3) {
        const step = 10 ** Math.floor(Math.log10((high - low) / 2));
        const many = (high - low) / step > 8 ? 5 * step : step;
        ticks = [];
        for (let k = Math.ceil(low / many); k * many <= high; k++) ticks.push(Number((k * many).toPrecision(12)));
      }
      const every = Math.ceil(ticks.length / 9);
      return ticks.filter((_tick, index) => index % every === 0);
    };
    return { splits, filter: (_, ticks) => ticks };
  }

  class View {
    constructor(figure, chart, section) {
      Object.assign(this, { figure, chart, section });
      this.place = figure.querySelector(".plot");
      this.log = figure.querySelector("[data-log]");
      this.whole = figure.querySelector("[data-whole]");
      this.log.addEventListener("change", () => this.draw());
      this.whole?.addEventListener("change", () => this.draw());
      this.place.addEventListener("keydown", event => this.onKey(event));
      this.place.addEventListener("blur", () => this.moveTo(null));
      this.read();
      new ResizeObserver(() => this.fit()).observe(this.place); // which draws what is unfolded
    }

    visible(line) { return this.section.shown[line.method]; }

    draw() {
      this.plot?.destroy();
      this.plot = null;
      if (!this.size().width) return; // folded away: `fit` draws it when it is shown
      const floor = this.log.checked ? logFloor(this.chart) : null;
      this.log.disabled = logFloor(this.chart) === null;
      const tables = this.chart.lines.map(line =>
        points(line, this.section.methods[line.method], this.section.axis, this.chart, floor));
      this.plot = new uPlot(this.options(floor !== null), uPlot.join(tables), this.place);
      this.place.dataset.points = String(this.plot.data[0].length);
      this.read();
    }

    size() {
      return printing ? PRINT_SIZE : { width: this.place.clientWidth, height: this.place.clientHeight };
    }

    fit() {
      const { width, height } = this.size();
      if (!this.plot) this.draw();
      else if (width && (width !== this.plot.width || height !== this.plot.height)) this.plot.setSize({ width, height });
    }

    options(isLog) {
      const base = this.chart.base;
      const axis = {
        stroke: color("--quiet"), font: "12px system-ui, sans-serif", labelFont: "12px system-ui, sans-serif",
        grid: { stroke: color("--grid"), width: 1 }, ticks: { stroke: color("--grid"), width: 1 },
      };
      const numbers = (_, splits) => splits.map(value => (value === null ? null : tick(value)));
      return {
        ...this.size(), legend: { show: false }, padding: [10, 12, 0, 0],
        scales: {
          x: { time: false, range: (plot, low, high) => this.xRange(plot, low, high) },
          y: isLog ? { distr: 3, log: base, range: logRange } : { range: (_, low, high) => this.linearRange(low, high) },
        },
        axes: [
          { ...axis, label: data.axes[this.section.axis], labelSize: 20, size: 34, values: numbers, space: 60,
            ...(this.section.axis === "seconds" ? {} : { incrs: WHOLE_NUMBERS }) },
          { ...axis, size: 58, values: numbers, ...(isLog ? logTicks(base) : {}) },
        ],
        series: [{}, ...this.chart.lines.flatMap(line => this.series(line))],
        bands: this.chart.lines.map((line, index) => ({
          series: [PER_LINE * index + 2, PER_LINE * index + 3], fill: `${this.color(line)}2b`,
        })),
        cursor: {
          y: false, drag: { x: true, y: false },
          points: { show: (_, index) => (index % PER_LINE === 1 ? document.createElement("div") : false), size: 7 },
          sync: { key: this.section.key, scales: ["x", null], setSeries: false },
        },
        hooks: { setCursor: [plot => plot === this.plot && this.read()] },
      };
    }

    // Called before the other axis is ranged, which depends on whether the curves are shown whole.
    xRange(plot, low, high) {
      if (low === null || high === null) return [0, 1];
      const xs = plot.data[0];
      this.isZoomed = low > xs[0] || high < xs[xs.length - 1];
      return low === high ? uPlot.rangeNum(low, high, 0.1, true) : [low, high];
    }

    // Early epochs of whole curves may run off the axis, which they would stretch.
    linearRange(low, high) {
      const { focus } = this.chart;
      if (focus && !this.isZoomed && !this.whole.checked) return focus;
      return low === null || high === null ? [0, 1] : uPlot.rangeNum(low, high, 0.1, true);
    }

    // Its method's, unless it has its own.
    colors(line) { return line.color ? line : this.section.methods[line.method]; }

    color(line) {
      const { color, dark } = this.colors(line);
      return isDark() ? dark : color;
    }

    series(line) {
      const paths = this.chart.steps ? { paths: uPlot.paths.stepped({ align: -1 }) } : {};
      const edge = { show: this.visible(line), width: 0, stroke: "transparent", points: { show: false }, ...paths };
      const few = line.mean.length <= 12 && !this.chart.steps;
      const mean = {
        label: line.label, show: this.visible(line), stroke: this.color(line), width: line.width ?? 2, dash: line.dash,
        points: { show: few, size: 5, fill: this.color(line) }, ...paths,
      };
      return [mean, edge, edge];
    }

    // Values at the cursor, or each line's last ones where there is no cursor.
    read() {
      const { plot } = this;
      const index = plot?.cursor.idx;
      const hasCursor = index !== null && index !== undefined && plot.cursor.left >= 0;
      const where = hasCursor ? `${data.axes[this.section.axis]} ${shown(plot.data[0][index])}` : "At the end";
      const entries = this.chart.lines.filter(line => this.visible(line)).map(line => this.entry(line, hasCursor));
      const heading = document.createElement("span");
      heading.className = "where";
      heading.textContent = entries.length ? where : "No method is chosen.";
      this.figure.querySelector(".readout").replaceChildren(heading, ...entries);
    }

    entry(line, hasCursor) {
      const part = (name, text) => {
        const element = document.createElement("span");
        element.className = name;
        element.textContent = text;
        return element;
      };
      const { color, dark } = this.colors(line);
      const kind = line.dash.length ? (line.dash[0] < 3 ? "dotted" : "dashed") : "solid";
      const swatch = part(`swatch ${kind}`, "");
      swatch.style.setProperty("--light", color);
      swatch.style.setProperty("--dark", dark);
      const item = part("entry", "");
      item.append(swatch, part("label", line.label), " ", part("value", this.value(line, hasCursor)));
      return item;
    }

    value(line, hasCursor) {
      const places = this.section.methods[line.method].x[this.section.axis];
      if (!places) return "not recorded";
      let point = line.mean.length - 1;
      if (hasCursor) {
        const x = this.plot.data[0][this.plot.cursor.idx];
        point = nearest(line.at.map(place => places[place]), x);
        const { min, max } = this.plot.scales.x;
        if (Math.abs(places[line.at[point]] - x) > 0.03 * (max - min)) return "–";
      }
      if (line.mean[point] === null) return "–";
      return shownWithError(line.mean[point], line.error[point]);
    }

    // Keyboard: through the places that some line has a point at.
    onKey(event) {
      if (!this.plot) return;
      const last = this.plot.data[0].length - 1;
      const now = this.at ?? last;
      const steps = { ArrowLeft: now - 1, ArrowRight: now + 1, PageUp: now - 10, PageDown: now + 10, Home: 0, End: last };
      if (event.key === "Escape") this.moveTo(null);
      else if (event.key in steps) this.moveTo(Math.max(0, Math.min(last, steps[event.key])));
      else return;
      event.preventDefault();
      this.figure.querySelector(".spoken").textContent = this.figure.querySelector(".readout").innerText;
    }

    moveTo(index) {
      if (!this.plot) return;
      this.at = index;
      const left = index === null ? -10 : this.plot.valToPos(this.plot.data[0][index], "x");
      this.plot.setCursor({ left, top: index === null ? -10 : 10 });
    }

    toggle() {
      this.plot?.batch(() => this.chart.lines.forEach((line, index) => {
        for (let part = 1; part <= PER_LINE; part++) {
          this.plot.setSeries(PER_LINE * index + part, { show: this.visible(line) });
        }
      }));
      this.read();
    }

    resetZoom() {
      const xs = this.plot?.data[0] ?? [];
      if (xs.length) this.plot.setScale("x", { min: xs[0], max: xs[xs.length - 1] });
    }
  }

  function nearest(places, x) {
    let best = 0;
    places.forEach((place, index) => { if (Math.abs(place - x) < Math.abs(places[best] - x)) best = index; });
    return best;
  }

  class Section {
    constructor(element, { methods, charts }, number) {
      Object.assign(this, { element, methods, axis: "epochs", key: `section-${number}` });
      this.shown = methods.map(() => true);
      this.views = [...element.querySelectorAll("[data-chart]")].map(
        figure => new View(figure, charts[Number(figure.dataset.chart)], this));
      views.push(...this.views);
      element.querySelectorAll('.axis input').forEach(radio => radio.addEventListener("change", () => this.setAxis(radio.value)));
      this.boxes = [...element.querySelectorAll(".methods input")];
      this.boxes.forEach(box => box.addEventListener("change", () => this.update()));
      element.querySelectorAll("[data-all]").forEach(button => button.addEventListener("click", () => {
        this.boxes.forEach(box => { box.checked = Boolean(button.dataset.all); });
        this.update();
      }));
      element.querySelector("[data-reset]")?.addEventListener("click", () => this.views.forEach(view => view.resetZoom()));
      const unit = element.querySelector("[data-unit]");
      unit?.addEventListener("change", () => this.setUnit(unit.value));
      if (unit) this.setUnit(unit.value);
      const checked = element.querySelector(".axis input:checked"); // browsers keep it over a reload
      if (checked && checked.value !== this.axis) this.setAxis(checked.value);
      if (this.boxes.some(box => !box.checked)) this.update();
    }

    setAxis(axis) {
      this.axis = axis;
      this.views.forEach(view => view.draw());
    }

    setUnit(axis) {
      this.element.querySelectorAll(".bars table").forEach(table => { table.hidden = table.dataset.axis !== axis; });
    }

    update() {
      this.boxes.forEach(box => { this.shown[Number(box.dataset.method)] = box.checked; });
      this.views.forEach(view => view.toggle());
      this.element.querySelectorAll(".bars tr").forEach(row => {
        row.hidden = row.dataset.method !== "" && !this.shown[Number(row.dataset.method)];
      });
    }
  }

  const redraw = () => views.forEach(view => view.draw());

  function setTheme(name) {
    root.classList.toggle("dark", name === "dark");
    root.classList.toggle("light", name === "light");
    redraw();
  }

  root.classList.add("scripted");
  document.querySelectorAll("[data-section]").forEach(element => {
    const number = Number(element.dataset.section);
    new Section(element, data.sections[number], number);
  });
  const theme = document.getElementById("theme");
  theme.addEventListener("change", () => setTheme(theme.value));
  if (theme.value !== "system") setTheme(theme.value);
  darkSystem.addEventListener("change", redraw);

  let themeBefore = "system";
  addEventListener("beforeprint", () => {
    themeBefore = theme.value;
    printing = true;
    document.querySelectorAll("details.more").forEach(details => { details.open = true; });
    setTheme("light");
  });
  addEventListener("afterprint", () => {
    printing = false;
    setTheme(themeBefore);
  });
})();
