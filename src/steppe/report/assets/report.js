"use strict";
/* The page's two movements: surfaces that turn, and a legend that brings lines to the front. */
(() => {
  const start = { azimuth: -0.7, elevation: 0.55, zoom: 1 };
  const view = { ...start };
  const canvases = [...document.querySelectorAll("canvas[data-surface]")];
  const grids = new Map(canvases.map((canvas) => [canvas, JSON.parse(canvas.dataset.surface)]));
  const colours = [...document.querySelectorAll("#palette stop")].map((stop) => stop.getAttribute("stop-color"));
  const shades = colours.map((hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16)));

  function colour(height, light) {
    const at = Math.min(Math.max(height, 0), 1) * (shades.length - 1);
    const i = Math.min(Math.floor(at), shades.length - 2);
    const mixed = shades[i].map((c, k) => Math.round((c + (shades[i + 1][k] - c) * (at - i)) * light));
    return `rgb(${mixed.join()})`;
  }

  /* From the unit cube to the canvas: turned about the vertical, tilted, slightly in perspective. */
  function camera(width, height) {
    const sinA = Math.sin(view.azimuth), cosA = Math.cos(view.azimuth);
    const sinE = Math.sin(view.elevation), cosE = Math.cos(view.elevation);
    const size = 0.29 * Math.min(width, height * 1.25) * view.zoom;
    return (x, y, z) => {
      const across = x * cosA - y * sinA, deep = x * sinA + y * cosA;
      const up = z * cosE + deep * sinE, far = deep * cosE - z * sinE;
      const scale = (size * 6) / (6 + far);
      return [width * 0.52 + across * scale, height * 0.43 - up * scale, far];
    };
  }

  /* Quads of the surface, far ones first; a corner without a height leaves a hole. */
  function quads(grid, project, stride) {
    const n = grid.length, found = [], lift = 1.1;
    const marks = [];
    for (let i = 0; i < n - 1; i += stride) marks.push(i);
    marks.push(n - 1);
    const place = marks.map((i) => marks.map((j) => {
      const h = grid[i][j];
      return h === null ? null : project((2 * j) / (n - 1) - 1, (2 * i) / (n - 1) - 1, lift * (h - 0.5));
    }));
    for (let a = 0; a + 1 < marks.length; a++) {
      for (let b = 0; b + 1 < marks.length; b++) {
        const p = [place[a][b], place[a][b + 1], place[a + 1][b + 1], place[a + 1][b]];
        if (p.includes(null)) continue;
        const [i, j, k, l] = [marks[a], marks[b], marks[a + 1], marks[b + 1]];
        const h = [grid[i][j], grid[i][l], grid[k][l], grid[k][j]];
        const slope = (h[1] + h[2] - h[0] - h[3]) * 0.5 - (h[2] + h[3] - h[0] - h[1]) * 0.35;
        const light = Math.min(1.12, Math.max(0.72, 1 + (slope * n) / (10 * (k - i))));
        found.push({ p, depth: p[0][2] + p[1][2] + p[2][2] + p[3][2], h: (h[0] + h[1] + h[2] + h[3]) / 4, light });
      }
    }
    return found.sort((a, b) => b.depth - a.depth);
  }

  function outline(context, points) {
    context.beginPath();
    points.forEach(([x, y], i) => (i ? context.lineTo(x, y) : context.moveTo(x, y)));
    context.closePath();
  }

  function draw(canvas, moving) {
    const grid = grids.get(canvas);
    const ratio = Math.min(window.devicePixelRatio || 1, 2);
    const width = canvas.clientWidth || 480, height = Math.round(width * 0.79);
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    const style = getComputedStyle(canvas);
    const soft = style.getPropertyValue("--soft").trim(), line = style.getPropertyValue("--line").trim();
    const project = camera(width, height);
    const floor = [[-1, -1], [1, -1], [1, 1], [-1, 1]].map(([x, y]) => project(x, y, -0.56));
    context.strokeStyle = line;
    outline(context, floor);
    context.stroke();
    const stride = moving && grid.length > 40 && canvases.length > 3 ? 2 : 1;
    context.lineWidth = 0.6;
    for (const quad of quads(grid, project, stride)) {
      outline(context, quad.p);
      context.fillStyle = context.strokeStyle = colour(quad.h, quad.light);
      context.fill();
      context.stroke();
    }
    context.fillStyle = soft;
    context.font = `${Math.max(11, width / 34)}px system-ui, sans-serif`;
    context.textAlign = "center";
    const nearer = (p, q) => (project(...p)[2] < project(...q)[2] ? p : q);
    const d2 = nearer([0, -1.22, -0.56], [0, 1.22, -0.56]), d1 = nearer([-1.22, 0, -0.56], [1.22, 0, -0.56]);
    for (const [name, at] of [["d₁", d1], ["d₂", d2]]) {
      const [x, y] = project(...at);
      context.fillText(name, x, y + 4);
    }
    upright(context, project, canvas.dataset);
    canvas.dataset.azimuth = view.azimuth.toFixed(4);
    canvas.dataset.elevation = view.elevation.toFixed(4);
    canvas.dataset.zoom = view.zoom.toFixed(3);
  }

  /* The scale of the loss, at the corner farthest to the left. */
  function upright(context, project, ends) {
    const corners = [[-1, -1], [1, -1], [1, 1], [-1, 1]];
    const [x, y] = corners.reduce((best, c) => (project(...c, 0)[0] < project(...best, 0)[0] ? c : best));
    const low = project(x, y, -0.55), high = project(x, y, 0.55);
    context.strokeStyle = context.fillStyle;
    context.lineWidth = 1;
    context.beginPath();
    context.moveTo(low[0] - 6, low[1]);
    context.lineTo(high[0] - 6, high[1]);
    context.stroke();
    context.textAlign = "left";
    for (const [words, at] of [[ends.low, low], [ends.high, high]]) {
      context.fillText(words, Math.max(2, at[0] - 11 - context.measureText(words).width), at[1] + 4);
    }
  }

  let asked = false, moving = false;
  function redraw() {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => {
      asked = false;
      canvases.forEach((canvas) => draw(canvas, moving));
    });
  }
  function turn(azimuth, elevation, zoom = 1) {
    view.azimuth += azimuth;
    view.elevation = Math.min(1.5, Math.max(-0.2, view.elevation + elevation));
    view.zoom = Math.min(3, Math.max(0.5, view.zoom * zoom));
    redraw();
  }
  const ways = {
    left: () => turn(0.12, 0), right: () => turn(-0.12, 0), up: () => turn(0, 0.1), down: () => turn(0, -0.1),
    in: () => turn(0, 0, 1.15), out: () => turn(0, 0, 1 / 1.15),
    reset: () => { Object.assign(view, start); redraw(); },
  };
  const keys = {
    ArrowLeft: "left", ArrowRight: "right", ArrowUp: "up", ArrowDown: "down",
    "+": "in", "=": "in", "-": "out", Home: "reset", 0: "reset",
  };

  for (const canvas of canvases) {
    let last = null;
    canvas.addEventListener("pointerdown", (event) => {
      last = [event.clientX, event.clientY];
      moving = true;
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!last) return;
      turn((last[0] - event.clientX) / 140, (event.clientY - last[1]) / 160);
      last = [event.clientX, event.clientY];
    });
    const release = () => { last = null; moving = false; redraw(); };
    canvas.addEventListener("pointerup", release);
    canvas.addEventListener("pointercancel", release);
    canvas.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in keys)) return;
      event.preventDefault();
      ways[keys[event.key]]();
    });
  }
  for (const button of document.querySelectorAll("[data-turn]")) {
    button.addEventListener("click", () => ways[button.dataset.turn]());
  }

  /* A pressed name in a legend dims the others of its section. */
  for (const button of document.querySelectorAll("[data-pick]")) {
    button.addEventListener("click", () => {
      const section = button.closest("section");
      const pressed = button.getAttribute("aria-pressed") !== "true";
      for (const other of section.querySelectorAll("[data-pick]")) other.setAttribute("aria-pressed", String(pressed && other === button));
      section.classList.toggle("picked", pressed);
      for (const series of section.querySelectorAll(".series")) {
        series.classList.toggle("dim", series.dataset.series !== button.dataset.pick);
      }
    });
  }

  window.addEventListener("resize", redraw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  document.documentElement.classList.remove("no-script");
  redraw();
})();
