// Returns [contrast by WCAG, text, figure] of each text of a page, over what is painted below it.
() => {
  const parse = (text) => (text.match(/[\d.]+/g) || []).map(Number);
  const over = (top, below) => {
    const a = top.length > 3 ? top[3] : 1;
    return [0, 1, 2].map((i) => a * top[i] + (1 - a) * below[i]);
  };
  const light = (rgb) => {
    const [r, g, b] = rgb.map((v) => v / 255).map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const page = parse(getComputedStyle(document.body).backgroundColor);
  const layers = (element, x, y) => document.elementsFromPoint(x, y)
    .filter((other) => !element.contains(other) && !other.closest("text"))
    .map((other) => {
      const style = getComputedStyle(other), drawn = other instanceof SVGGeometryElement || other.tagName === "use";
      const paint = drawn ? style.fill : style.backgroundColor;
      if (paint === "none" || !paint.startsWith("rgb")) return null;
      const alpha = parseFloat(style.opacity) * (drawn ? parseFloat(style.fillOpacity) : 1), rgb = parse(paint);
      return [...rgb.slice(0, 3), alpha * (rgb.length > 3 ? rgb[3] : 1)];
    }).filter(Boolean);
  const found = [];
  const texts = [...document.querySelectorAll("figure svg text, td, th, li, p, figcaption, h1, h2, label, button, a")];
  for (const element of texts) {
    if (!element.textContent.replaceAll("\u200b", "").trim() || element.closest("details:not([open])")) continue;
    element.scrollIntoView({ block: "center", inline: "center" });
    const box = element.getBoundingClientRect(), style = getComputedStyle(element);
    if (!box.width || element.closest(".sample")) continue;
    const below = layers(element, box.x + box.width / 2, box.y + box.height / 2).reverse().reduce((b, top) => over(top, b), page);
    const own = element instanceof SVGElement ? style.fill : style.color;
    const ink = over(parse(own), below);
    const behind = element instanceof SVGElement ? below : over(parse(style.backgroundColor), below);
    const [a, b] = [light(ink), light(behind)].sort((x, y) => y - x);
    found.push([(a + 0.05) / (b + 0.05), element.textContent.trim().slice(0, 40), element.closest("figure")?.id ?? ""]);
  }
  return found;
}
