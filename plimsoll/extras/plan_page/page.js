"use strict";
// Moves the elements of a plan's page through planned points, and copies commands. Nothing is fetched or computed.

function show(figures) {
  for (const element of document.querySelectorAll("[data-follow]")) {
    for (const pair of element.dataset.follow.split(" ")) {
      const [attribute, key] = pair.split(":");
      // Figures that all points share are not stored, and stay.
      if (!(key in figures)) continue;
      if (attribute === "text") element.textContent = figures[key];
      else element.setAttribute(attribute, figures[key]);
    }
  }
}

function slide(form, data) {
  const axes = ["batch", "sequence"];
  const inputs = Object.fromEntries(axes.map(axis => [axis, form.elements[axis]]));
  const value = axis => inputs[axis] ? data[axis][inputs[axis].valueAsNumber] : data[axis][0];
  const status = form.appendChild(document.createElement("p"));
  status.className = "bad";

  function draw(save = true) {
    for (const axis of axes.filter(axis => inputs[axis])) {
      const text = value(axis).toLocaleString("en");
      form.elements[`${axis}-value`].value = text;
      inputs[axis].setAttribute("aria-valuetext", text);
    }
    const figures = data.points[axes.map(value).join()];
    document.body.classList.toggle("impossible", !figures);
    status.textContent = figures ? "" : "The config does not allow this combination.";
    if (figures) show(figures);
    const moved = axes.some(axis => value(axis) !== data.asked[axis]);
    document.body.classList.toggle("moved", moved);
    form.querySelector(".back").disabled = !moved;
    // The address of the page names the point, so that a link to it opens the page there.
    if (save) history.replaceState(null, "", moved ? `#${axes.map(axis => `${axis}=${value(axis)}`).join("&")}` : "#");
  }

  function open() {
    const point = new URLSearchParams(location.hash.slice(1));
    for (const axis of axes.filter(axis => inputs[axis] && point.has(axis))) {
      const index = data[axis].indexOf(Number(point.get(axis)));
      if (index >= 0) inputs[axis].value = index;
    }
    draw(false);
  }

  function reset() {
    for (const axis of axes.filter(axis => inputs[axis])) {
      inputs[axis].value = data[axis].indexOf(data.asked[axis]);
    }
  }

  form.addEventListener("input", () => draw());
  form.addEventListener("submit", event => event.preventDefault());
  form.querySelector(".back").addEventListener("click", () => { reset(); draw(); });
  addEventListener("hashchange", () => { reset(); open(); });
  form.hidden = false;
  reset();
  open();
}

async function copy(button) {
  const code = button.parentElement.querySelector("code");
  try {
    await navigator.clipboard.writeText(code.textContent);
  } catch {
    // In a frame or an old browser, the clipboard API is missing: copy the selection instead.
    getSelection().selectAllChildren(code);
    document.execCommand("copy");
  }
  button.textContent = "copied";
  setTimeout(() => { button.textContent = "copy"; }, 1500);
}

const points = document.getElementById("points");
if (points) slide(document.querySelector(".controls"), JSON.parse(points.textContent));
for (const button of document.querySelectorAll(".copy")) {
  button.hidden = false;
  button.addEventListener("click", () => copy(button));
}
