// Mouse and touch on the picture: pointing at a place shows its content, choosing it goes in.
"use strict";

const fingers = matchMedia("(pointer: coarse)");

// Chooses the text for a mouse or for a touch screen, which cannot point without touching.
const byHand = (mouse, touch) => (fingers.matches ? touch : mouse);

function mouse(event) {
  const box = picture.getBoundingClientRect();
  return [event.clientX - box.left, event.clientY - box.top];
}

// Returns the part of memory at a position, on the outermost level.
const partAt = (x) => drawn.memory.find((one) => x >= one.x && x < one.x + one.wide);

byId("picture").addEventListener("mousemove", (event) => {
  const [x, y] = mouse(event);
  if (view.level === "memory") {
    const part = partAt(x);
    byId("tip").hidden = !part;
    if (part) tell(`${part.name}: ${count(part.bytes)} bytes, ${part.more}`, x, y);
    return;
  }
  const point = pointAt(x, y);
  byId("tip").hidden = !point;
  if (!point) return;
  cursor = { row: Math.floor((y - drawn.place.top) / drawn.place.height), x: 0, point };
  showCursor();
  showFacts(point);
  showTip(point, x, y);
});
byId("picture").addEventListener("mouseleave", () => { byId("tip").hidden = true; });

const FINGER = 24; // pixels between two taps that count as the same place
let tapped = { view: null, x: 0, y: 0 };

// Returns whether the place was tapped before: the first tap points, like a mouse, and the second one chooses.
function wasTapped(x, y) {
  const again = tapped.view === view && Math.hypot(x - tapped.x, y - tapped.y) < FINGER;
  tapped = { view, x, y };
  return again;
}

byId("picture").addEventListener("click", (event) => {
  const [x, y] = mouse(event), point = pointAt(x, y);
  const finger = (event.pointerType || byHand("mouse", "touch")) === "touch"; // some browsers do not report the pointer type
  if (finger && !wasTapped(x, y)) return;
  if (event.shiftKey && point && point.kind === "field") {
    followKind(paint.follow ? paint.follow.kind : headOf(point, view.tpRank) === null ? "token" : "head", point);
  } else goIn(point, partAt(x));
});

let turned = 0, resting = 0;
byId("picture").addEventListener("wheel", (event) => {
  // Scrolling the page must not zoom the picture: the picture needs the focus first.
  if (document.activeElement !== picture && !event.ctrlKey) return;
  const inner = view.level === "cell", outer = view.level === "memory";
  if ((event.deltaY < 0 && inner) || (event.deltaY > 0 && outer)) return;
  event.preventDefault();
  if (performance.now() < resting) return;
  turned += event.deltaY;
  if (Math.abs(turned) < 60) return;
  resting = performance.now() + 300;
  const [x, y] = mouse(event);
  if (turned < 0) goIn(pointAt(x, y), partAt(x));
  else goOut();
  turned = 0;
}, { passive: false });
