export { axisX, axisY, dot, gridX, gridY, line, plot, rect, ruleX, ruleY } from "@observablehq/plot";
